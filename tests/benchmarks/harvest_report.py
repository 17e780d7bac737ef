"""The figures of `bench harvest` as a table, with the goals beside them."""

from typing import Any, Final

MEMORY_GOAL_MIB: Final = 300
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
            of_cpu = figures["cpu_ratios"][name]
            lines.append(f"{name:<44} {ratio:>9.3f}  (CPU seconds {of_cpu:.3f}){mark}")
    lines += [f"{name}: {why}" for part in ("not_measured", "notes") for name, why in figures[part].items()]
    return "\n".join(lines)


def memory_table(figures: dict[str, Any]) -> str:
    """The peaks of a runner's memory, and how far they are apart."""
    lines = [f"{figures['model']} in {figures['dtype']}, all layers, {figures['tokens']} tokens in the larger job"]
    for n_prompts, peak in figures["peak_bytes"].items():
        lines.append(f"{n_prompts:>5} prompts: {peak / 2**20:>7.0f} MiB at most")
    apart = figures["difference_bytes"] / 2**20
    lines.append(f"apart: {apart:.0f} MiB  goal 300  {'met' if apart <= MEMORY_GOAL_MIB else 'MISSED'}")
    return "\n".join(lines)
