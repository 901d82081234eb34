class GenerationUnavailable(Exception):  # noqa: N818
    pass


class NoHealthyShards(Exception):  # noqa: N818
    pass
