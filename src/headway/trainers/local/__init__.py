"""A trainer in one process: any `transformers` decoder, full or with LoRA, with reference and critic.

    store = WeightStore(...)
    trainer = LocalTrainer(lambda: AutoModelForCausalLM.from_pretrained(path), make_local_settings(resolved), store)

`local_trainer` is the asynchronous part, `local_learner` everything that its thread does. One step reads top down:
`token_batch` (samples → arrays), `tree_packing` (arrays → trees without padding), `policy_model` (trees →
log-probabilities), `policy_update` (losses → gradients → weights).
"""
