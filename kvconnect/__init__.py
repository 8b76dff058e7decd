"""kvconnect: the storage-backend connector for disaggregated LLM KV caches."""
