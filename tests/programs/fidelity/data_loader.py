import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index * index])


def main():
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context=method)
        print(method, [batch.flatten().tolist() for batch in loader])


if __name__ == "__main__":
    main()
