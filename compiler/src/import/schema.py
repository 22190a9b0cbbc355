"""Prints the table of schema.rs from the installed onnx package.

    python compiler/src/import/schema.py
"""

from collections import defaultdict

import onnx.defs

OLDEST, ANY = 7, 255

versions = defaultdict(list)
for s in onnx.defs.get_all_schemas_with_history():
    if s.domain == "" and not s.deprecated:
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
