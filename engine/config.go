package engine

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
)

// Config is what an engine is made of. Only Model and Tokenizer are required.
type Config struct {
	Model     model.Model         // the caller closes it, after the engine
	Tokenizer tokenizer.Tokenizer // for its stop tokens

	BlockSize        int  // tokens of a block; default 16
	NumBlocks        int  // blocks of the cache; default: enough for 4 sequences of MaxModelLen
	MaxModelLen      int  // longest sequence, prompt and generation together; default: what model and cache can hold
	MaxBatchedTokens int  // tokens computed in one step at most; default 512
	MaxSeqs          int  // sequences in one step at most; default 16
	MaxWaiting       int  // requests that may wait before Submit answers ErrOverloaded; default 1024
	PrefixCaching    bool // keep full blocks of ended requests for prompts that start alike

	Connector  *host.Config // nil: no connector
	PluginPath []string     // folders in which to look for plugins
	Events     EventSink    // is told which blocks the engine has; nil: nobody is
	// LayerPatience is how long a step waits for layers of KV that is being loaded, all of them together, so that requests
	// are computed while their last layers are still on their way; default 100 ms. Negative: they wait for the whole load.
	LayerPatience time.Duration

	Log     *slog.Logger // nil: slog.Default()
	Metrics prometheus.Registerer
}

// withDefaults fills in what was left out and refuses what cannot work, naming the field.
func (c Config) withDefaults() (Config, error) {
	if c.Model == nil || c.Tokenizer == nil {
		return c, fmt.Errorf("engine config: model and tokenizer are required")
	}
	spec := c.Model.Spec()
	if _, sharded := c.Model.(model.Sharded); spec.Ranks > 1 && !sharded {
		return c, fmt.Errorf("engine config: model %s cannot be spread over %d ranks", spec.Name, spec.Ranks)
	}
	for _, f := range []struct {
		name    string
		value   *int
		initial int
	}{
		{"block size", &c.BlockSize, 16},
		{"max batched tokens", &c.MaxBatchedTokens, 512},
		{"max sequences", &c.MaxSeqs, 16},
		{"max waiting", &c.MaxWaiting, 1024},
		{"max model length", &c.MaxModelLen, spec.MaxTokens},
		{"number of blocks", &c.NumBlocks, 0},
	} {
		if *f.value < 0 {
			return c, fmt.Errorf("engine config: %s is %d, want a positive number", f.name, *f.value)
		}
		*f.value = cmp.Or(*f.value, f.initial)
	}
	if c.MaxModelLen > spec.MaxTokens {
		return c, fmt.Errorf("engine config: max model length is %d, but model %s handles at most %d tokens", c.MaxModelLen, spec.Name, spec.MaxTokens)
	}
	groups := c.Model.Layout(c.BlockSize, 1).Groups
	for g := range groups {
		if n := groups[g].BlockTokens; n != c.BlockSize {
			return c, fmt.Errorf("engine config: model %s has blocks of %d tokens in group %d, want %d in all", spec.Name, n, g, c.BlockSize)
		}
	}
	c.NumBlocks = cmp.Or(c.NumBlocks, 4*len(groups)*((c.MaxModelLen+c.BlockSize-1)/c.BlockSize))
	c.MaxModelLen = min(c.MaxModelLen, c.NumBlocks/len(groups)*c.BlockSize)
	if c.MaxModelLen == 0 {
		return c, fmt.Errorf("engine config: number of blocks is %d, want one at least for each of %d groups", c.NumBlocks, len(groups))
	}
	c.LayerPatience = cmp.Or(c.LayerPatience, 100*time.Millisecond)
	c.Log = cmp.Or(c.Log, slog.Default())
	if c.Metrics == nil {
		c.Metrics = prometheus.NewRegistry()
	}
	return c, nil
}

// shape is the fingerprint of a block's byte layout: engines whose shapes differ cannot exchange
// blocks even if they run the same model.
func (c Config) shape(layout connector.Layout) connector.Fingerprint {
	spec := c.Model.Spec()
	fields := []string{spec.ByteShape, strconv.Itoa(c.BlockSize), "ranks", strconv.Itoa(max(1, spec.Ranks))}
	for _, s := range layout.Segments {
		fields = append(fields, fmt.Sprintf("layer %d group %d bytes %d", s.Layer, s.Group, s.Bytes))
	}
	return connector.NewFingerprint("kvport/shape/1", slices.Clip(fields)...)
}

// fit is how an engine without a connector describes itself: nothing can be handed over.
func (c Config) fit(layout connector.Layout) host.Fit {
	spec := c.Model.Spec()
	ranks := max(1, spec.Ranks)
	bytes := int64(0)
	for g := range layout.Groups {
		bytes = max(bytes, layout.BlockBytes(uint16(g)))
	}
	return host.Fit{
		Role: "none", Model: spec.Weights.String(), BlockSize: c.BlockSize, Shape: c.shape(layout).String(),
		ShapeText: fmt.Sprintf("block_size %d, %d layers in %d groups, %d ranks, %d bytes a block and rank, %s",
			c.BlockSize, spec.Layers, len(layout.Groups), ranks, bytes, spec.ByteShape),
	}
}

// base is the fingerprint of what a block's content is, however it is cut into blocks and over ranks; zero
// if blocks cannot be cut. Blocks of a window do not hold all of their tokens for as long as others, so
// caches that have some are not cut.
func (c Config) base(layout connector.Layout) connector.Fingerprint {
	spec := c.Model.Spec()
	ranks := max(1, spec.Ranks)
	fields := []string{spec.ByteShape}
	for _, g := range layout.Groups {
		if g.Policy != connector.PolicyAll {
			return connector.Fingerprint{}
		}
	}
	for i, s := range layout.Segments {
		if s.Layer == connector.DigestLayer {
			continue
		}
		if _, err := layout.CutOf(i, 0, ranks); err != nil {
			return connector.Fingerprint{}
		}
		fields = append(fields, fmt.Sprintf("layer %d group %d planes %d heads %d bytes %d",
			s.Layer, s.Group, s.Planes, s.Heads*ranks, s.Bytes*int64(ranks)/int64(c.BlockSize)))
	}
	return connector.NewFingerprint("kvport/base/1", fields...)
}

// Info is what a front end must know to check requests and to say what it serves.
type Info struct {
	Model       string // the model's name
	Vocab       int    // token ids are 0..Vocab-1
	MaxModelLen int    // prompt and generation together
	BlockSize   int
	NumBlocks   int
	MaxSeqs     int    // requests that are computed at once
	Connector   string // empty: none
	// UnsignedPairs says that the connector believes request ids that name two engines without a signature.
	UnsignedPairs bool
	Fit           host.Fit
}

// Health is what /health says about an engine.
type Health struct {
	Running int          `json:"running"` // requests in the batch
	Waiting int          `json:"waiting"` // requests that wait, parked loads included
	Blocks  Blocks       `json:"blocks"`
	Closing bool         `json:"closing,omitempty"`
	Host    *host.Health `json:"connector,omitempty"` // nil without a connector
}

// Blocks counts the slots of the cache by state; the four add up to all of them.
type Blocks struct {
	Free   int `json:"free"`   // reusable, cached content included
	Used   int `json:"used"`   // belong to requests
	Pinned int `json:"pinned"` // a running transfer reads or writes them
	Held   int `json:"held"`   // kept for consumers
}
