"""One layer's attention, before and after: what passes between the stages."""
