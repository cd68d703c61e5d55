"""What AirMoE is compared with: other rules, single heads, controls, and single models, one file each."""
