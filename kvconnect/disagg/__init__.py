"""Prefill/decode disaggregation: KV moves straight from a prefill pool to a decode pool.

The two sides may differ in TP, PP, page size, layout and head dimensions of K and V. What one
rank sends to another is the intersection of what both hold, planned once per pair and expanded
to any pages by a few array operations (`kvconnect.disagg.pair_plan`).
"""
