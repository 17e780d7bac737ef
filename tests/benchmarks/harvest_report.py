"""The figures of `bench harvest` as a table, with the goals beside them."""

from typing import Any, Final

GOALS: Final = {
    "end_to_end_over_prefill": 0.95,
    "capture_over_prefill": 0.97,
    "all_layers_over_prefill": 0.85,
    "all_layers_capture_over_prefill": 0.95,
    "over_huggingface": 1.6,
    "over_vllm_lens": 1.0,
    "compiled_end_to_end_over_prefill": 1.1,
}


def table(figures: dict[str, Any]) -> str:
    """Tokens a second of each way, then the ratios."""
    lines = [
        f"{figures['model']} in {figures['dtype']}, {figures['cpus']} CPUs, {figures['prompts']} prompts, "
        f"{figures['tokens']} tokens, layers {figures['layers']}, medians of {figures['rounds']} rounds",
        "",
    ]
    for name, value in figures["tokens_per_s"].items():
        lines.append(f"{name:<44} {value:>9.1f} tokens/s")
    lines.append("")
    for name, ratio in figures["ratios"].items():
        goal = GOALS.get(name)
        if ratio is None:
            lines.append(f"{name:<44}         - not measured")
        else:
            mark = "" if goal is None else f"  goal {goal:.2f}  {'met' if ratio >= goal else 'MISSED'}"
            lines.append(f"{name:<44} {ratio:>9.3f}{mark}")
    lines += [f"{name}: {why}" for name, why in figures["not_measured"].items()]
    return "\n".join(lines)
