"""The live dashboard: one page about runs, served from their event logs, ledgers and sample logs. It only reads."""
