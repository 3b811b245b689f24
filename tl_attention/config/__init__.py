"""How it is computed: kernel configs, the tables that choose them, and the rules that they keep."""
