"""Clusters for tests: hosts as namespaces with disks of their own, or over ssh; real faults."""
