def _get_node_ip_local() -> str:
    return "127.0.0.1"


def _get_free_port_local() -> int:
    return 0
