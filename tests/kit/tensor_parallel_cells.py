"""Methods on tensor parallel models in two processes, beside the same in one: started by torchrun.

    python -m torch.distributed.run --nproc-per-node=2 tensor_parallel_cells.py CELLS.json FOLDER

CELLS.json lists (model type, method). The first process writes FOLDER/results.json: for each cell
"ok", or what differs.
"""

import json
import sys
import warnings
from pathlib import Path

import every_type
import torch
import torch.distributed as dist
import transformers
from transformers import CONFIG_MAPPING

import adapterhub as ah
from adapterhub.anatomy.backbone import shared_like, whole
from adapterhub.backbones.tensor_parallel import planned_config
from adapterhub.errors import AdapterhubError

CAUSAL = "AutoModelForCausalLM"
IDS = torch.arange(20).view(2, 10) + 5


def has_plan(model_type):
    """Return whether transformers has a tensor parallel plan for a decoder's type."""
    if not every_type.autos(model_type, (CAUSAL,)):
        return False
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # its options have no defaults
        return False
    return planned_config(config) is not None


def save_models(model_types, folder):
    """Write a tiny model of each type, where one can be built; return their classes."""
    classes = {}
    for model_type in model_types:
        torch.manual_seed(0)
        model = every_type.build(model_type, CAUSAL, tiny=True)
        if model is not None:
            classes[model_type] = type(model)
            if dist.get_rank() == 0:
                model.save_pretrained(folder / model_type)
    dist.barrier()
    return classes


def divided_and_whole(cls, folder):
    """Load a model over two processes, and in one."""
    from transformers.distributed import DistributedConfig  # absent in older versions

    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    return [cls.from_pretrained(folder, **o).eval() for o in ({"distributed_config": plan}, {})]


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def trained(model, method, seed):
    """Attach an adapter with values of its own; return it, the outputs and its gradients."""
    torch.manual_seed(seed)
    adapter = ah.attach(model, method)
    generator = torch.Generator().manual_seed(3)
    tensors = dict(sorted(adapter.tensors().items()))
    with torch.no_grad():
        for tensor in filter(torch.is_floating_point, tensors.values()):
            noise = 0.05 * torch.randn(tensor.shape, generator=generator)
            tensor.add_(shared_like(tensor, noise))
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    grads = {n: whole(t.grad) for n, t in tensors.items() if t.grad is not None}
    return adapter, output.logits.detach(), grads


def refusal(model, method):
    """Return why a method is refused; "" if it is not."""
    try:
        ah.attach(model, method)
    except AdapterhubError as refused:
        return refused.problem
    ah.detach(model)
    return ""


def difference(divided, alone):
    """Compare outputs, gradients and greedy texts of a divided model and a whole one."""
    (_, found, found_grads), (_, expected, grads) = divided, alone
    if (error := float((found - expected).abs().max())) > 1e-4:
        return f"outputs differ by {error:.1e}"
    if grads.keys() != found_grads.keys():
        return f"gradients of other tensors: {sorted(grads.keys() ^ found_grads.keys())}"
    scale = max(float(g.norm()) for g in grads.values())
    for name, gradient in grads.items():
        if (error := float((found_grads[name] - gradient).norm()) / scale) > 1e-3:
            return f"the gradient of {name} differs by {error:.1e}"
    return ""


class Pair:
    """A model over two processes and the same in one, with the logits of the first.

    Raises:
        NotDivided: transformers cannot divide it, without adapters.
    """

    def __init__(self, cls, folder):
        try:
            self.divided, self.alone = divided_and_whole(cls, folder)
            self.bare = logits(self.divided)
            error = float((self.bare - logits(self.alone)).abs().max())
            self.divided(input_ids=IDS, labels=IDS).loss.backward()
            self.divided.zero_grad()
        except Exception as failed:
            raise NotDivided(type(failed).__name__) from failed
        if not error < 1e-3:
            raise NotDivided(f"its outputs differ by {error:.1e}")

    def compare(self, method):
        """Attach a method to both; return `ok`, `refused alike`, or what differs."""
        models = self.divided, self.alone
        refusals = [refusal(model, method) for model in models]
        if any(refusals):
            return "refused alike" if refusals[0] == refusals[1] else f"refused: {refusals}"
        # Other numbers in each process: the adapter begins with those of the first one.
        found = trained(self.divided, method, seed=dist.get_rank())
        expected = trained(self.alone, method, seed=0)
        if problem := difference(found, expected):
            return problem
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        texts = (model.generate(IDS, **options) for model in models)
        if not torch.equal(*texts):
            return "other greedy texts"
        for model in models:
            ah.detach(model)
            model.zero_grad()
        same = torch.equal(logits(self.divided), self.bare)
        return "ok" if same else "detached, its outputs differ"


class NotDivided(Exception):
    """Why transformers cannot divide a model."""


def results_of(cls, folder, methods):
    """Return the result of each method on a model: `ok`, `refused alike`, or what differs."""
    found, pair = [], None
    for method in methods:
        try:
            pair = pair or Pair(cls, folder)
            found.append(pair.compare(method))
        except NotDivided as reason:
            return [f"not divided: {reason}"] * len(methods)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        if found[-1] not in ("ok", "refused alike"):
            pair = None  # what the method left is not what the next one begins with
    return found


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cells, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    methods = {}
    for model_type, method in cells:
        methods.setdefault(model_type, []).append(method)
    classes, results = save_models(methods, folder), {}
    for model_type, some in methods.items():
        found = ["not built"] * len(some)
        if model_type in classes:
            found = results_of(classes[model_type], folder / model_type, some)
        results |= {
            (model_type, method): result for method, result in zip(some, found, strict=True)
        }
    results = [results[model_type, method] for model_type, method in cells]
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
