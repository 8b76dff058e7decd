"""Clusters for tests: hosts as network namespaces or over ssh, real stores, real faults."""
