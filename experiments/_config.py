"""Presets: what a script does depends on its data set, and --tiny makes it a miniature for the tests."""

import dataclasses
from typing import Any


def filled(config: Any, presets: dict[str, dict[str, Any]]) -> Any:
    """`config` with its None fields taken from presets["tiny"] if `config.tiny`, else from presets[config.data].

    What the user gave on the command line stays. A field that neither preset names stays None. A script without data sets
    calls its preset "digits"; one that has no `mnist` preset takes that of digits.
    """
    chosen = presets["digits"] | presets.get(getattr(config, "data", "digits"), {})
    if config.tiny:
        chosen |= presets["tiny"]
    return dataclasses.replace(config, **{k: v for k, v in chosen.items() if getattr(config, k) is None})
