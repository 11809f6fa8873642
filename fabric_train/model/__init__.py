"""The Hugging Face model: configuration, weights, sharding, attention, loss and FLOPs.

Open ``hf_model.py`` first. ``parallelize.py`` shows in order what happens to a model before it trains, and
``lm_head_loss.py`` how a Llama computes its loss.
"""
