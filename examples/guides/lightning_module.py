import lightning
import torch
from transformers import AutoModelForCausalLM

import safe_rope
from safe_rope.integrations import SafeRopeLightningCallback


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained("my-model", dtype=torch.bfloat16)

    def training_step(self, batch, index):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


with safe_rope.guard(strict=True):
    module = Model()

batches = torch.utils.data.DataLoader([torch.arange(i, i + 16) for i in range(4)], batch_size=2)
trainer = lightning.Trainer(max_steps=2, logger=False, callbacks=[SafeRopeLightningCallback()])
trainer.fit(module, batches)
