"""The embedded NVMe store (see `kvconnect_nvme.store`)."""
