"""The typed ops that every model is lowered to, and what they read and write.

A Program is a flat list of ops over named buffers and parameters. `T` below is the number of tokens of a
step, `N` the number of rows whose logits are wanted. Rows of a buffer are tokens (body) or logit rows (head).

    body   embed · (norm · linear · rope_write · attend · linear · norm · linear · gated_act · linear)*
    head   gather_rows · norm · linear

with add and scale where a model multiplies embeddings, branches or logits or runs two branches side by side. A
feed-forward of experts is

    linear · route · dispatch · experts · gated_act · experts · combine

over rows of (token, expert) pairs, sorted by expert, so that an expert's rows are neighbours. Latent attention is

    linear q · linear kv · latent_write · head_linear · latent_attend · head_linear

Adapters of low rank put shrink before a linear, shrink_experts before experts, shrink_ids and expand behind embed.

A rank of several has collectives between these: all_gather, all_reduce, all_to_all.

The torch executor defines what each op computes; the native executor is compared with it op by op.
"""
