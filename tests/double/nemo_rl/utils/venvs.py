def create_local_venv_on_each_node(py_executable: str, venv_name: str) -> str:
    return f"venvs/{venv_name}/bin/python"
