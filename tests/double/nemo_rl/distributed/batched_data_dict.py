from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence


class BatchedDataDict(UserDict):
    """Tensors and lists with a row for each sample."""

    @classmethod
    def __class_getitem__(cls, _: Any) -> type[BatchedDataDict]:
        return cls

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping], pad_value_dict: dict[str, Any] | None = None
    ) -> BatchedDataDict:
        filled = [batch for batch in batches if any(len(value) for value in batch.values())]
        joined = cls()
        for key in sorted({key for batch in filled for key in batch}):
            rows = [row for batch in filled for row in batch[key]]
            if isinstance(filled[0][key], list):
                joined[key] = rows
            elif rows[0].ndim == 0:
                joined[key] = torch.stack(rows)
            else:
                joined[key] = pad_sequence(
                    rows, batch_first=True, padding_value=(pad_value_dict or {}).get(key, 0)
                )
        return joined

    @property
    def size(self) -> int:
        return len(next(iter(self.values()))) if self else 0

    def select_indices(self, indices: Sequence[int]) -> BatchedDataDict:
        return type(self)(
            {
                key: [value[index] for index in indices] if isinstance(value, list) else value[indices]
                for key, value in self.items()
            }
        )

    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[BatchedDataDict]:
        share = -(-self.size // shards)
        rows = list(range(self.size))
        return [self.select_indices(rows[start : start + share]) for start in range(0, shards * share, share)]
