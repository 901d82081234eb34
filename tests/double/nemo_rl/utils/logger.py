def get_next_experiment_dir(base_log_dir: str) -> str:
    return f"{base_log_dir}/exp_001"
