"""Everything one optimizer update needs: its state, the optimizer, and the compiled step."""
