"""NIXL: one owner of its agent, for the engines of the nvme store and for object stores.

Importing this package is cheap; the library is loaded when an agent is made.
"""
