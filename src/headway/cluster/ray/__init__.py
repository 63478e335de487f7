"""Parts of a run as actors of a Ray cluster. Needs the extra `ray`; nothing outside this package imports that."""
