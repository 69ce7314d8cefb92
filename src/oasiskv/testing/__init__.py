"""What tests of OasisKV, and of systems built on it, need: disturbed hot sets, faulty stores."""
