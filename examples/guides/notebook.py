import torch
from transformers import AutoModelForCausalLM

import safe_rope

session = safe_rope.guard().start()
model = AutoModelForCausalLM.from_pretrained("my-model", dtype=torch.bfloat16)
session.report  # the last line of a cell: shown as text
session.stop()
safe_rope.audit(model)
