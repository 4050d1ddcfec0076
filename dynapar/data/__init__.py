"""Sources, index, sampler and loader: from files to the samples that a rank runs."""
