"""What an attach would store, in words: pool geometry, plan, key record, and the warnings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvconnect.descriptors import describe
from kvconnect.engines.sglang.identity import KV, identify
from kvconnect.engines.sglang.options import parse
from kvconnect.engines.sglang.served import find_facts
from kvconnect.explain import explain_identity
from kvconnect.foreign import wrap
from kvconnect.registry import open_url


def explain_pool(host_pool: Any, config: Any) -> str:
    """Return the text of `kvconnect.engines.sglang.explain`; raises as an attach would."""
    options = parse(config.extra_config)
    facts = find_facts(options)
    pool = wrap(host_pool, KV)
    found = identify(pool, host_pool, KV, config, options, facts)
    with open_url(options.url) as backend:
        name, capabilities = backend.name, backend.capabilities
    plan = describe(
        pool,
        found.placement,
        capabilities,
        options.want,
        object_layout=found.object_layout,
        tp_sizes=found.tp_sizes,
        head_group=found.head_group,
        layer_chunk=found.layer_chunk,
    )
    identity = replace(found.identity, object_layout=plan.signature)
    replicas = (
        f"{found.placement.replicas} ranks hold the same bytes; "
        + ("they take turns by page" if found.elect_writer else "SGLang lets one of them write")
        if found.placement.replicas > 1
        else "every rank stores its own part"
    )
    # Options of the URL may be credentials, which have no place in a text that is passed around.
    where = options.url.partition("?")[0]
    lines = [f"store {name} at {where}", plan.explain(), explain_identity(identity)]
    lines.append(f"writers: {replicas}")
    if not options.interface_v1:
        lines.append(
            "interface_v1 is 0: SGLang copies each page to a flat tensor and kvconnect from there; "
            "set it to 1 to move pages in place"
        )
    return "\n".join([*lines, *(f"warning: {text}" for text in found.warnings)])
