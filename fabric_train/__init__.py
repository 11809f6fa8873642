"""Fabric Train: continued pretraining and fine-tuning of Llama-3 on Lightning Fabric and FSDP."""
