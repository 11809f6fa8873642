"""The command line of the system that this project continues, with every argument that it had and its default."""

FORMER_COMMAND_LINE = """
--devices 4 --tpu False --train_data_dir /data/tokens --model_name meta-llama/Meta-Llama-3-8B --precision bf16-true
--auto_wrap_policy LlamaDecoderLayer --sharding_strategy FULL_SHARD --state_dict_type full --limit_all_gathers True
--cpu_offload False --resume False --checkpoint None --number_epochs 2 --micro_batch_size 1
--gradient_accumulation_steps 64 --grad_clip 1.0 --max_step 6145 --lr 2e-5 --min_lr 2e-5 --lr_decay True
--warmup_steps 0 --weight_decay 0.01 --beta1 0.9 --beta2 0.95 --eval_batch_size 1 --eval_iters 1000000
--eval_step_interval 500 --save_step_interval 1000 --entity a_team --project fabric_llama --log_model all
"""
