"""Clusters for tests: hosts as network namespaces with disks of their own, and real faults."""
