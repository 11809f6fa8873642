"""The Hugging Face model and what is done to it: shape, weights, sharding, attention, the loss in its head, FLOPs.

Read ``hf_model.py`` first, then ``lm_head_loss.py`` for how a Llama computes its loss.
"""
