"""Runs Python of guides, given as a JSON object of names and texts, each in a namespace of its own."""

import json
import sys
import traceback


def main() -> int:
    """Run each text; the names of those that raised, and their tracebacks, go to standard error."""
    failed = 0
    for name, text in json.load(sys.stdin).items():
        try:
            exec(compile(text, f"docs/{name}.md", "exec"), {"__name__": name})
        except Exception:  # noqa: BLE001 (each is reported)
            sys.stderr.write(f"--- {name}\n{text}\n{traceback.format_exc()}\n")
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
