"""Spellings of other frameworks, as tables of data: verl, ROLL and TRL. `headway.config.translation` applies them."""
