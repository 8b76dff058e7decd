"""Adapters: kvconnect as a storage backend of inference engines, one package each.

Importing an adapter imports no engine; the class that the engine loads is made on first use.
"""
