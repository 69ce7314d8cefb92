"""Engine-neutral parts: geometry, resident map, digests, selection and the transfer pipeline."""
