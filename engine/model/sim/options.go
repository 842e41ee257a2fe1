package sim

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvport/kvport/connector"
)

// Options shape a sim model. The zero value is a small one with one rank and one group.
type Options struct {
	Layers        int    // default 4
	BytesPerToken int    // KV bytes of one token in one layer on one rank, a multiple of 16 for each of its heads; default 64 on all
	MaxTokens     int    // default 8192
	Seed          uint64 // two seeds are two sets of weights
	Ranks         int    // default 1
	Heads         int    // KV heads of a layer on all ranks, which have equal shares; default one on each, or 4 without BytesPerToken
	Groups        int    // layer l is in group l modulo Groups; default 1
	Window        int    // tokens that layers of all groups but the first attend to, at least 2; default 64
	Stride        Stride // default ByLayer
}

// Stride says where in a rank's cache the layers and blocks lie.
type Stride string

// The strides. Those that cut blocks into the same segments have the same shape: they can exchange
// blocks. All but ByLayer have gaps or overlaps, so that nothing but the layout tells where a block is.
const (
	ByLayer  Stride = "layers" // one array of blocks for each layer
	ByBlock  Stride = "blocks" // all layers of a block together, with gaps between them
	ByPlane  Stride = "planes" // K and V of a layer apart: first all layers' K, then all V
	ByShared Stride = "shared" // as vLLM does: groups use the same memory, a block belongs to one of them
)

// Strides lists all strides.
func Strides() []Stride { return []Stride{ByLayer, ByBlock, ByPlane, ByShared} }

// gap is what lies between two segments of a ByBlock layout, in bytes.
const gap = 48

// ParseOptions reads options as the command line has them: name=value, separated by commas. The
// names are layers, bytes, heads, seed, groups, window and stride; the empty text is the default model.
func ParseOptions(text string) (Options, error) {
	var o Options
	if text == "" {
		return o, nil
	}
	numbers := map[string]*int{"layers": &o.Layers, "bytes": &o.BytesPerToken, "heads": &o.Heads, "groups": &o.Groups, "window": &o.Window}
	for field := range strings.SplitSeq(text, ",") {
		name, value, _ := strings.Cut(field, "=")
		var err error
		switch number := numbers[name]; {
		case number != nil:
			*number, err = strconv.Atoi(value)
		case name == "seed":
			o.Seed, err = strconv.ParseUint(value, 10, 64)
		case name == "stride":
			o.Stride = Stride(value)
		default:
			return o, fmt.Errorf("sim has no option %q: want layers, bytes, heads, seed, groups, window or stride", name)
		}
		if err != nil {
			return o, fmt.Errorf("sim option %s is %q, want a number", name, value)
		}
	}
	_, err := o.withDefaults()
	return o, err
}

// shareOut gives heads and bytes that were left out: those of all ranks together do not depend on their
// number, where it divides the heads.
func (o *Options) shareOut() {
	o.Ranks = cmp.Or(o.Ranks, 1)
	if o.Ranks < 0 || o.Heads < 0 || o.BytesPerToken < 0 {
		return // refused next
	}
	const heads, bytes = 4, 16
	switch {
	case o.Heads > 0 && o.BytesPerToken == 0:
		o.BytesPerToken = o.Heads / o.Ranks * bytes
	case o.Heads == 0 && o.BytesPerToken == 0 && heads%o.Ranks == 0:
		o.Heads, o.BytesPerToken = heads, heads/o.Ranks*bytes
	case o.Heads == 0:
		o.Heads = o.Ranks
	}
}

func (o Options) withDefaults() (Options, error) {
	o.shareOut()
	for _, f := range []struct {
		name    string
		value   *int
		initial int
		most    int
	}{
		{"layers", &o.Layers, 4, 1024},
		{"bytes per token", &o.BytesPerToken, 64, 1 << 20},
		{"max tokens", &o.MaxTokens, 8192, 1 << 24},
		{"ranks", &o.Ranks, 1, 64},
		{"heads", &o.Heads, 1, 64},
		{"groups", &o.Groups, 1, connector.MaxGroups},
		{"window", &o.Window, 64, 1 << 24},
	} {
		*f.value = cmp.Or(*f.value, f.initial)
		if *f.value < 0 || *f.value > f.most {
			return o, fmt.Errorf("%s is %d, want 1..%d", f.name, *f.value, f.most)
		}
	}
	o.Stride = cmp.Or(o.Stride, ByLayer)
	switch {
	case o.Heads%o.Ranks != 0:
		return o, fmt.Errorf("heads is %d, want a multiple of %d ranks", o.Heads, o.Ranks)
	case o.BytesPerToken%(16*(o.Heads/o.Ranks)) != 0:
		return o, fmt.Errorf("bytes per token is %d, want a multiple of 16 for each of %d heads", o.BytesPerToken, o.Heads/o.Ranks)
	case o.Groups > o.Layers:
		return o, fmt.Errorf("%d groups for %d layers", o.Groups, o.Layers)
	case o.Window < 2:
		return o, fmt.Errorf("window is %d, want at least 2", o.Window)
	case !slices.Contains(Strides(), o.Stride):
		return o, fmt.Errorf("stride is %q, want one of %q", o.Stride, Strides())
	}
	return o, nil
}

// window is how many positions a layer attends to, 0 for all. A group has that of its first layer.
func (o *Options) window(layer int) int {
	if layer%o.Groups == 0 {
		return 0
	}
	return o.Window
}

// Layout implements model.Model. Whatever the stride, the segments of a layer come one after the
// other in the list: the list decides the shape, the offsets do not.
func (m *Model) Layout(blockTokens, blocks int) connector.Layout {
	l := connector.Layout{Name: "sim/" + string(m.o.Stride), Blocks: blocks}
	for g := range m.o.Groups {
		group := connector.Group{BlockTokens: blockTokens, Policy: connector.PolicyAll}
		if w := m.o.window(g); w > 0 {
			// Attention at the first position of a block reaches back window-1 positions.
			group.Policy, group.Trailing = connector.PolicyTrailing, (w-1+blockTokens-1)/blockTokens
		}
		l.Groups = append(l.Groups, group)
	}
	for layer := range m.o.Layers {
		l.Segments = append(l.Segments, m.segments(layer, blockTokens, blocks)...)
	}
	return l
}

// segments places one layer.
func (m *Model) segments(layer, blockTokens, blocks int) []connector.Segment {
	size := int64(blockTokens) * int64(m.o.BytesPerToken)
	s := connector.Segment{Layer: layer, Group: uint16(layer % m.o.Groups), BlockStride: size, Bytes: size, Planes: 1, Heads: m.o.Heads / m.o.Ranks}
	array := int64(blocks) * size
	switch m.o.Stride {
	case ByBlock:
		s.Offset, s.BlockStride = gap+int64(layer)*(size+gap), gap+int64(m.o.Layers)*(size+gap)
	case ByPlane:
		k := s
		k.Bytes, k.BlockStride, k.Offset = size/2, size/2, int64(layer)*array/2
		v := k
		v.Offset += int64(m.o.Layers) * array / 2
		return []connector.Segment{k, v}
	case ByShared:
		s.Offset = int64(layer/m.o.Groups) * array
	case ByLayer:
		s.Offset = int64(layer) * array
	}
	return []connector.Segment{s}
}
