package vllmtrace

import (
	"fmt"

	"github.com/kvport/kvport/connector"
)

// LayoutOf is the paged cache that a worker registered, as kvport describes it, and the size of its
// storage in bytes. A trace names the offsets of the first layers; the others must follow evenly.
func LayoutOf(init *InitCall, r *RegisterCall) (connector.Layout, int64, error) {
	l, err := layoutOf(init, r)
	if err == nil {
		err = l.Validate([]int64{r.StorageBytes})
	}
	if err != nil {
		return connector.Layout{}, 0, fmt.Errorf("%w: cache: %w", ErrTrace, err)
	}
	return l, r.StorageBytes, nil
}

func layoutOf(init *InitCall, r *RegisterCall) (l connector.Layout, err error) {
	size := map[string]int64{"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}[r.DType]
	switch {
	case size == 0:
		return l, fmt.Errorf("dtype %s", r.DType)
	case len(init.Groups) != 1:
		return l, fmt.Errorf("%d groups, the shim knows one", len(init.Groups))
	case len(r.Shape) == 0 || len(r.Shape) != len(r.Stride) || r.Shape[0] != init.NumBlocks:
		return l, fmt.Errorf("shape %v, strides %v, %d blocks", r.Shape, r.Stride, init.NumBlocks)
	}
	elements := int64(1)
	for i, n := range r.Shape[1:] {
		elements += int64(n-1) * int64(r.Stride[i+1])
	}
	offsets, err := offsetsOf(r, int64(init.NumBlocks)*int64(r.Stride[0]))
	if err != nil {
		return l, err
	}
	l = connector.Layout{
		Name: "vllm/LBHNC", Blocks: init.NumBlocks,
		Groups: []connector.Group{{BlockTokens: init.BlockSize, Policy: connector.PolicyAll}},
	}
	for i, at := range offsets {
		l.Segments = append(l.Segments, connector.Segment{
			Layer: i, Offset: at * size, BlockStride: int64(r.Stride[0]) * size, Bytes: elements * size,
		})
	}
	return l, nil
}

// offsetsOf are where the layers begin, in elements; each spans so many.
func offsetsOf(r *RegisterCall, span int64) ([]int64, error) {
	known := r.LayerOffsets
	if len(known) == 0 || r.Layers > 1 && len(known) < 2 || r.Layers < len(known) {
		return nil, fmt.Errorf("%d layers at offsets %v", r.Layers, known)
	}
	step := span
	if r.Layers > 1 {
		step = known[1] - known[0]
	}
	if step < span {
		return nil, fmt.Errorf("layers %d elements apart overlap, each has %d", step, span)
	}
	offsets := make([]int64, r.Layers)
	for i := range offsets {
		offsets[i] = known[0] + int64(i)*step
		if i < len(known) && known[i] != offsets[i] {
			return nil, fmt.Errorf("layer %d at element %d, want %d", i, known[i], offsets[i])
		}
	}
	return offsets, nil
}
