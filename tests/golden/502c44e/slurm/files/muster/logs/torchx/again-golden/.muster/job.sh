#!/bin/sh
#SBATCH --job-name=again-golden
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=@STATE@/muster/logs/torchx/again-golden/.muster/slurm.log
#SBATCH --open-mode=append
#SBATCH --chdir=@WORK@
#SBATCH --requeue
#SBATCH --cpus-per-task=1
#SBATCH --mem=128M
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --cpus-per-task=1 @PYTHON@ @STATE@/muster/logs/torchx/again-golden/.muster/node.zip @STATE@/muster/logs/torchx/again-golden
