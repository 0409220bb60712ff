"""The facts and options of all methods. Generated: do not edit, run `make catalogue`."""
# ruff: noqa
# fmt: off

from typing import Any, Literal

# name: (module, summary, paper, learning rate, schedule, {option: (type, default, help)})
CATALOGUE: dict[str, tuple[str, str, str, float, str | None, dict[str, tuple[Any, Any, str]]]] = {
    'adapterfusion': ('adapterfusion', 'learned mix of several trained adapters, which stay frozen', 'Pfeiffer et al. 2021, https://arxiv.org/abs/2005.00247', 5e-05, None, {
        'adapters': (tuple[str, ...], (), 'trained adapters to mix: names of attached adapters, or folders'),
        'members': (tuple[Any, ...], (), 'methods of these adapters (set automatically)'),
    }),
    'bitfit': ('bitfit', 'train only the bias terms of the backbone', 'Ben Zaken et al. 2022, https://arxiv.org/abs/2106.10199', 0.001, None, {
        'sites': (Literal['all'] | tuple[str, ...], 'all', 'projections and norms whose bias to train, or all'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to train: all, 'top 4', '0..3', [0, 5]"),
    }),
    'chosen': ('selected_parameters', 'train selected backbone parameters, by default the token embeddings', 'Artetxe et al. 2020, https://arxiv.org/abs/1910.11856', 0.0005, None, {
        'names': (tuple[str, ...], ('embeddings',), 'embeddings, or names as in adapter files with * as a wildcard (decoder.*.attn.q.weight)'),
        'untied': (bool, False, 'train only the named uses of tied parameters, each by itself'),
    }),
    'compacter': ('compacter', 'bottleneck adapters built from Kronecker products with shared factors', 'Karimi Mahabadi et al. 2021, https://arxiv.org/abs/2106.04647', 0.003, None, {
        'size': (int, 64, 'bottleneck width'),
        'n': (int, 4, "number of Kronecker products; must divide size and the backbone's width"),
        'rank': (int, 1, 'rank of the products s_i t_i'),
        'activation': (str, 'gelu', 'activation function, by its transformers name'),
        'source': (Literal['output', 'block'], 'output', 'input of the network: y (output) or norm(r + y) (block)'),
        'sites': (tuple[str, ...], ('attn', 'cross', 'ffn'), 'sublayers to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'dora': ('dora', "low-rank update of a weight's direction, with a trained magnitude", 'Liu et al. 2024, https://arxiv.org/abs/2402.09353', 0.001, None, {
        'rank': (int, 8, 'rank r of the update'),
        'alpha': (float, 16.0, 'numerator of the scale: updates are multiplied by alpha / rank'),
        'dropout': (float, 0.0, 'dropout probability on the input of A'),
        'ranks': (dict[str, int], {}, 'other ranks for some sites: {attn.q: 4}'),
        'sites': (tuple[str, ...], ('attn.q', 'attn.v', 'cross.q', 'cross.v'), 'projections to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'freeze': ('freeze', 'train the top layers, freeze the lower ones', 'Lee et al. 2019, https://arxiv.org/abs/1911.03090', 0.0001, None, {
        'top': (int, 2, 'number of layers to train, from the top'),
        'decay': (float, 1.0, 'learning rate divisor per layer, from the top down'),
    }),
    'full': ('full', 'train every parameter of the backbone', 'Devlin et al. 2019, https://arxiv.org/abs/1810.04805', 5e-05, None, {
        'decay': (float, 1.0, 'learning rate divisor per layer, from the top down'),
    }),
    'head': ('head', 'train only the task head (linear probe)', 'Alain & Bengio 2017, https://arxiv.org/abs/1610.01644', 0.005, None, {
    }),
    'houlsby': ('bottleneck', 'sequential bottleneck adapters after attention and feed-forward', 'Houlsby et al. 2019, https://arxiv.org/abs/1902.00751', 0.001, None, {
        'size': (int, 64, 'bottleneck width'),
        'sizes': (dict[str, int], {}, 'other widths for some sites: {encoder.ffn: 32}'),
        'activation': (str, 'gelu', 'activation function, by its transformers name'),
        'scale': (float, 1.0, "factor s of the network's output"),
        'source': (Literal['output', 'block'], 'output', 'input of the network: y (output) or norm(r + y) (block)'),
        'sites': (tuple[str, ...], ('attn', 'cross', 'ffn'), 'sublayers to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'ia3': ('ia3', 'learned vectors that rescale keys, values and the feed-forward hidden layer', 'Liu et al. 2022, https://arxiv.org/abs/2205.05638', 0.005, None, {
        'sites': (tuple[str, ...], ('attn.k', 'attn.v', 'cross.k', 'cross.v', 'ffn.down'), 'projections to rescale: at their output, unless listed in inputs'),
        'inputs': (tuple[str, ...], ('ffn.down',), 'projections to rescale at their input'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'lora': ('lora', 'low-rank updates of projections', 'Hu et al. 2022, https://arxiv.org/abs/2106.09685', 0.001, None, {
        'rank': (int, 8, 'rank r of the update'),
        'alpha': (float, 16.0, 'numerator of the scale: updates are multiplied by alpha / rank'),
        'dropout': (float, 0.0, 'dropout probability on the input of A'),
        'ranks': (dict[str, int], {}, 'other ranks for some sites: {attn.q: 4}'),
        'sites': (tuple[str, ...], ('attn.q', 'attn.v', 'cross.q', 'cross.v'), 'projections to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'lora-plus': ('lora_plus', 'LoRA with a higher learning rate for B than for A', 'Hayou et al. 2024, https://arxiv.org/abs/2402.12354', 0.0002, None, {
        'rank': (int, 8, 'rank r of the update'),
        'alpha': (float, 16.0, 'numerator of the scale: updates are multiplied by alpha / rank'),
        'dropout': (float, 0.0, 'dropout probability on the input of A'),
        'ranks': (dict[str, int], {}, 'other ranks for some sites: {attn.q: 4}'),
        'sites': (tuple[str, ...], ('attn.q', 'attn.v', 'cross.q', 'cross.v'), 'projections to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
        'ratio': (float, 16.0, 'learning rate of B, as a multiple of that of A'),
    }),
    'mam': ('mam', 'prefix tuning + scaled parallel adapters', 'He et al. 2022, https://arxiv.org/abs/2110.04366', 0.001, None, {
        'length': (int, 30, 'prefix length in tokens'),
        'size': (int, 64, 'bottleneck width'),
        'scale': (float, 4.0, "factor s of the adapters' output"),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'norms': ('norms', 'train only the normalization layers of the backbone', 'Qi et al. 2022, https://arxiv.org/abs/2211.08682', 0.001, None, {
        'layers': (str | int | tuple[int, ...], 'all', "layers to train: all, 'top 4', '0..3', [0, 5]"),
        'outside': (bool, True, 'also train norms outside the layers, such as the final one'),
    }),
    'p-tuning': ('p_tuning', 'virtual tokens in front of the input, computed by a network during training', 'Liu et al. 2021, https://arxiv.org/abs/2103.10385', 0.001, None, {
        'length': (int, 20, 'prompt length in tokens'),
        'sites': (tuple[str, ...], ('embed',), 'stack to adapt; of two, the encoder'),
        'counts_padding': (bool, False, 'padding of the text counts as text, as in peft'),
        'encoder': (Literal['mlp', 'lstm'], 'mlp', 'network that computes the prompt'),
        'middle': (int | None, None, 'hidden width of the network; null: embedding width'),
    }),
    'parallel': ('bottleneck', 'bottleneck adapters parallel to feed-forward', 'He et al. 2022, https://arxiv.org/abs/2110.04366', 0.001, None, {
        'size': (int, 64, 'bottleneck width'),
        'sizes': (dict[str, int], {}, 'other widths for some sites: {encoder.ffn: 32}'),
        'activation': (str, 'relu', 'activation function, by its transformers name'),
        'scale': (float, 1.0, "factor s of the network's output"),
        'source': (Literal['input', 'residual'], 'input', 'input of the network: x (input) or r (residual)'),
        'sites': (tuple[str, ...], ('ffn',), 'sublayers to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'pfeiffer': ('bottleneck', 'sequential bottleneck adapters after feed-forward', 'Pfeiffer et al. 2021, https://arxiv.org/abs/2005.00247', 0.001, None, {
        'size': (int, 64, 'bottleneck width'),
        'sizes': (dict[str, int], {}, 'other widths for some sites: {encoder.ffn: 32}'),
        'activation': (str, 'relu', 'activation function, by its transformers name'),
        'scale': (float, 1.0, "factor s of the network's output"),
        'source': (Literal['output', 'block'], 'output', 'input of the network: y (output) or norm(r + y) (block)'),
        'sites': (tuple[str, ...], ('ffn',), 'sublayers to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'pissa': ('pissa', 'LoRA initialized with the principal components of the weight', 'Meng et al. 2024, https://arxiv.org/abs/2404.02948', 0.0005, None, {
        'rank': (int, 8, 'rank r of the update'),
        'alpha': (float, 8.0, 'numerator of the scale: updates are multiplied by alpha / rank'),
        'dropout': (float, 0.0, 'dropout probability on the input of A'),
        'ranks': (dict[str, int], {}, 'other ranks for some sites: {attn.q: 4}'),
        'sites': (tuple[str, ...], ('attn.q', 'attn.v', 'cross.q', 'cross.v'), 'projections to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
        'iterations': (int, 8, 'power iterations of the randomized SVD; 0: exact SVD'),
    }),
    'prefix': ('prefix', 'learned keys and values in front of every attention', 'Li & Liang 2021, https://arxiv.org/abs/2101.00190', 0.01, None, {
        'length': (int, 30, 'prefix length in tokens'),
        'reparametrize': (bool, False, 'compute the prefix by a network during training'),
        'middle': (int, 512, 'hidden width of that network'),
        'positions': (bool | Literal['keys'], False, 'count positions from after the prefix; keys: only relative positions of keys'),
        'sites': (tuple[str, ...], ('attn.kv', 'cross.kv'), 'attentions to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'prompt': ('prompt', 'learned virtual tokens in front of the input', 'Lester et al. 2021, https://arxiv.org/abs/2104.08691', 0.03, None, {
        'length': (int, 20, 'prompt length in tokens'),
        'sites': (tuple[str, ...], ('embed',), 'stack to adapt; of two, the encoder'),
        'counts_padding': (bool, False, 'padding of the text counts as text, as in peft'),
    }),
    'rslora': ('rslora', 'LoRA with the scale alpha / sqrt(rank), for high ranks', 'Kalajdzievski 2023, https://arxiv.org/abs/2312.03732', 0.001, None, {
        'rank': (int, 16, 'rank r of the update'),
        'alpha': (float, 8.0, 'numerator of the scale: updates are multiplied by alpha / sqrt(rank)'),
        'dropout': (float, 0.0, 'dropout probability on the input of A'),
        'ranks': (dict[str, int], {}, 'other ranks for some sites: {attn.q: 4}'),
        'sites': (tuple[str, ...], ('attn.q', 'attn.v', 'cross.q', 'cross.v'), 'projections to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'scalar-mix': ('scalar_mix', 'learned weighted mean of the outputs of all layers', 'Peters et al. 2018, https://arxiv.org/abs/1802.05365', 0.01, None, {
        'sites': (tuple[str, ...], ('mix',), 'stacks to adapt: mix, encoder.mix, decoder.mix'),
    }),
    'scaled-parallel': ('bottleneck', 'scaled bottleneck adapters parallel to feed-forward', 'He et al. 2022, https://arxiv.org/abs/2110.04366', 0.0003, None, {
        'size': (int, 64, 'bottleneck width'),
        'sizes': (dict[str, int], {}, 'other widths for some sites: {encoder.ffn: 32}'),
        'activation': (str, 'relu', 'activation function, by its transformers name'),
        'scale': (float, 4.0, "factor s of the network's output"),
        'source': (Literal['input', 'residual'], 'input', 'input of the network: x (input) or r (residual)'),
        'sites': (tuple[str, ...], ('ffn',), 'sublayers to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
    'staged': ('staged', 'train groups of parameters one after the other: top layers, norms, everything', 'Kumar et al. 2022, https://arxiv.org/abs/2202.10054', 5e-05, None, {
        'every': (int | Literal['plateau', 'equal'], 1, 'epochs per stage; equal: all stages have as many steps; plateau: until the main metric stops improving'),
        'patience': (int, 1, 'evaluations without improvement that count as a plateau'),
        'groups': (tuple[str, ...], ('top 2', 'norms', 'everything'), 'one group per stage: top N, norms, embeddings, everything, head, a pattern, or A + B'),
        'decay': (float, 1.0, 'learning rate divisor per layer, from the top down'),
    }),
    'unfreeze': ('unfreeze', 'gradual unfreezing, from the top layer down', 'Howard & Ruder 2018, https://arxiv.org/abs/1801.06146', 0.0001, 'slanted', {
        'every': (int | Literal['plateau', 'equal'], 1, 'epochs per stage; equal: all stages have as many steps; plateau: until the main metric stops improving'),
        'patience': (int, 1, 'evaluations without improvement that count as a plateau'),
        'size': (int, 1, 'layers per group'),
        'decay': (float, 2.6, 'learning rate divisor per group, from the top down'),
    }),
    'unipelt': ('unipelt', 'LoRA + prefix tuning + sequential adapters, each with a gate', 'Mao et al. 2022, https://arxiv.org/abs/2110.07577', 0.001, None, {
        'rank': (int, 8, 'rank of the low-rank updates'),
        'length': (int, 10, 'prefix length in tokens'),
        'size': (int, 48, 'bottleneck width'),
        'positions': (bool | Literal['keys'], False, 'count positions from after the prefix, as for prefix'),
        'gate': (Literal['token', 'sequence'], 'token', 'one gate per token, or per sequence'),
        'source': (Literal['output', 'block'], 'output', 'input of the adapters: y (output) or norm(r + y) (block)'),
        'activation': (str, 'relu', 'activation of the adapters, by its transformers name'),
        'sites': (tuple[str, ...], ('attn.q', 'attn.v', 'cross.q', 'cross.v', 'attn.kv', 'cross.kv', 'ffn'), 'projections, attentions and sublayers to adapt'),
        'layers': (str | int | tuple[int, ...], 'all', "layers to adapt: all, 'top 4', '0..3', [0, 5]"),
    }),
}
