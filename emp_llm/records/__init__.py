"""Records: the files that emp-llm writes and reads, each declared once as a typed msgspec structure
with a format version.

Writers and readers use the same declaration; `docs/schemas/` holds a JSON Schema of each. May use
`common`, `options` (for the recipe) and `checkpoint`.
"""
