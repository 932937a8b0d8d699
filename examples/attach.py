"""transformers' own `generate` inside `attach`: streaming, sampling, two turns on one cache."""

import torch
from transformers import DynamicCache, TextStreamer

import reread
from reread.integrations.hf.cache import cache_keyword
from reread.integrations.hf.load import load

loaded = load("smollm2")
model, tokenizer = loaded.model, loaded.tokenizer
cache = DynamicCache(config=model.config)

torch.manual_seed(0)
with reread.attach(model, reread.Config(k=16, recent=16), tokenizer=tokenizer) as session:
    ids = tokenizer("The history of reading began when " * 12, return_tensors="pt").input_ids
    for _turn in range(2):
        ids = model.generate(
            ids,
            max_new_tokens=24,
            do_sample=True,
            streamer=TextStreamer(tokenizer),
            **{cache_keyword(model): cache},
        )
        more = tokenizer(" Later, ", return_tensors="pt", add_special_tokens=False).input_ids
        ids = torch.cat([ids, more], dim=1)
    stats = session.stats
print(f"{stats.fast_steps[0]} fast steps, {stats.slow_steps[0]} slow ones in the last turn")
