"""One accelerator's worth of serving: model, prefill, page pool, scheduler, sampler, snapshot. No Ray, no HTTP."""
