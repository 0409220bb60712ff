"""What vLLM does not serve of an adapter in the format of peft.

It serves LoRA on decoders, at ranks up to `--max-lora-rank`, which takes a few values; it has one
scale for all modules, and neither biases nor DoRA nor modules that were trained whole. Read from
its LoRA configuration, its reader of peft's options and its table of models,
https://docs.vllm.ai/en/latest/models/supported_models.html and
https://docs.vllm.ai/en/latest/features/lora.html (2026).
"""

from __future__ import annotations

from transformers import PreTrainedModel

from adapterhub.interchange.peft.files import PeftFiles

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
DEFAULT_RANK = 16
# Of the decoders with a row here, those that its table of models marks for LoRA.
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
    """Every reason why vLLM would refuse the adapter, or compute something else with it."""
    name, config = type(model).__name__, files.config
    found = []
    if name not in ARCHITECTURES:
        found.append(f"{name}: vLLM serves LoRA on {', '.join(sorted(ARCHITECTURES))}")
    if files.kind != "LORA":
        return [*found, f"{files.kind}: vLLM serves LORA alone"]
    ranks = {config.get("r", 0), *(config.get("rank_pattern") or {}).values()}
    if max(ranks) > max_rank:
        fitting = next((r for r in RANKS if r >= max(ranks)), None)
        remedy = f"serve with --max-lora-rank {fitting}" if fitting else f"at most {RANKS[-1]}"
        found.append(f"rank {max(ranks)}: more than the server's {max_rank}; {remedy}")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        found.append("ranks or scales that differ: vLLM scales all modules by one alpha / rank")
    if config.get("use_dora"):
        found.append("use_dora: vLLM does not serve DoRA")
    if config.get("bias", "none") != "none":
        found.append("bias: vLLM takes no trained biases")
    if saved := config.get("modules_to_save"):
        found.append(f"modules_to_save: vLLM takes none, here {', '.join(saved)}")
    return found
