"""The features of a peft checkpoint that vLLM does not serve.

vLLM serves LoRA on decoders, at ranks up to `--max-lora-rank`, which accepts a few values. It uses
one scale for all modules and supports neither biases nor DoRA nor `modules_to_save`. Sources: its
LoRA configuration, its reader of peft's options and its table of models,
https://docs.vllm.ai/en/latest/models/supported_models.html and
https://docs.vllm.ai/en/latest/features/lora.html (2026).
"""

from __future__ import annotations

from transformers import PreTrainedModel

from adapterhub.interchange.peft.files import PeftFiles

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
DEFAULT_RANK = 16
# The decoders of our families that vLLM's table of models marks for LoRA.
ARCHITECTURES = frozenset(
    {
        "Gemma3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)


def vllm_problems(
    files: PeftFiles, model: PreTrainedModel, max_rank: int = DEFAULT_RANK
) -> list[str]:
    """List the reasons why vLLM would refuse the adapter or compute something else.

    `max_rank` is the server's `--max-lora-rank`.
    """
    name, config = type(model).__name__, files.config
    problems = []
    if name not in ARCHITECTURES:
        problems.append(f"{name}: vLLM serves LoRA on {', '.join(sorted(ARCHITECTURES))}")
    if files.kind != "LORA":
        return [*problems, f"{files.kind}: vLLM serves only LORA"]
    ranks = {config.get("r", 0), *(config.get("rank_pattern") or {}).values()}
    if max(ranks) > max_rank:
        fitting = next((r for r in RANKS if r >= max(ranks)), None)
        remedy = f"serve with --max-lora-rank {fitting}" if fitting else f"at most {RANKS[-1]}"
        problems.append(f"rank {max(ranks)}: more than the server's {max_rank}; {remedy}")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        problems.append("different ranks or scales: vLLM scales all modules by one alpha / rank")
    if config.get("use_dora"):
        problems.append("use_dora: vLLM does not serve DoRA")
    if config.get("bias", "none") != "none":
        problems.append("bias: vLLM does not support trained biases")
    if saved := config.get("modules_to_save"):
        problems.append(f"modules_to_save: vLLM does not support it, here {', '.join(saved)}")
    return problems
