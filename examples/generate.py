"""Slow-fast decoding in five lines, with the built-in model."""

import reread
from reread.integrations.hf.load import load

loaded = load("smollm2")
text = (reread.Config.__doc__ or "") * 3
ids = loaded.tokenizer(text, return_tensors="pt").input_ids

config = reread.Config.preset("default").updated({"k": 128, "recent": 64})
output = reread.generate(
    loaded.model, ids, config=config, max_new_tokens=32, tokenizer=loaded.tokenizer, do_sample=False
)
print(loaded.tokenizer.decode(output.sequences[0, ids.shape[1] :]))
print(f"{output.stats.fast_steps[0]} fast steps, {output.stats.slow_steps[0]} slow ones,")
print(f"{output.stats.keys_read_share:.0%} of the keys read")
