"""Prints the table of schema.rs from the installed onnx package.

    python compiler/src/import/schema.py
"""

from collections import defaultdict

import onnx.defs

OLDEST, ANY = 7, 255

schemas = [s for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""]
newest = {name: max(s.since_version for s in schemas if s.name == name) for name in {s.name for s in schemas}}
versions = defaultdict(list)
for s in schemas:
    # Deprecated is how an operator ends, and what a version is called that a later one puts right: files have those.
    if not s.deprecated or s.since_version < newest[s.name]:
        bounds = (s.min_input, min(s.max_input, ANY), s.min_output, min(s.max_output, ANY))
        versions[s.name].append((s.since_version, *bounds))
for name in sorted(versions):
    found = sorted(versions[name])
    old = [(OLDEST, *v[1:]) for v in found if v[0] <= OLDEST][-1:]
    merged = []
    for v in old + [v for v in found if v[0] > OLDEST]:
        if not merged or merged[-1][1:] != v[1:]:
            merged.append(v)
    text = ", ".join("v(" + ", ".join("ANY" if n == ANY else str(n) for n in v) + ")" for v in merged)
    print(f'    ("{name}", &[{text}]),')
