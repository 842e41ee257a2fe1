package conformance

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
)

func boundedCases() []Case {
	c := Case{
		ID: "random-bounded", Rule: "BOUND-01", Profiles: []Profile{Bounded}, Run: rigged(0, false, randomBounded),
		Text: "Random histories with small values of the options that bound what is kept: the bounds hold, and what is kept is right.",
	}
	return []Case{budgeted(c)}
}

func randomBounded(r *rig) {
	b := r.bounding()
	if len(b.fields) == 0 {
		r.Skipf("no option in the schema of the config says what it bounds")
	}
	r.theatre(&theatre{rig: r, options: model.Options{Reset: r.info.Capabilities&connector.CanReset != 0}, bounds: b})
}

// What an option may bound.
const (
	boundsBlocks  = "blocks"
	boundsBytes   = "bytes"
	boundsTenant  = "tenant_bytes"
	boundsSeconds = "seconds"
)

// bounding is the options of a connector's config that bound what it keeps, by their names.
type bounding struct{ fields map[string]string }

// bounding reads the schema. Of options that bound the size of all, those that the config has count, since others may contradict them;
// if it has none, the first.
func (r *rig) bounding() *bounding {
	r.Helper()
	b := &bounding{map[string]string{}}
	options, config := r.options()
	var sizes []string
	for _, name := range slices.Sorted(maps.Keys(options)) {
		switch what := options[name].Bounds; what {
		case "":
		case boundsTenant, boundsSeconds:
			b.fields[name] = what
		case boundsBlocks, boundsBytes:
			sizes = append(sizes, name)
			if config[name] != nil {
				b.fields[name] = what
			}
		default:
			r.Errorf("BOUND-01: option %s bounds %q, known are blocks, bytes, tenant_bytes and seconds", name, what)
		}
	}
	if b.tiers() == 0 && len(sizes) > 0 {
		b.fields[sizes[0]] = options[sizes[0]].Bounds
	}
	return b
}

// option is what the schema says about one.
type option struct {
	Bounds  string          `json:"bounds"`
	Default json.RawMessage `json:"default"`
}

// options are those of the schema, none if there is no manifest, and what the config has of them.
func (r *rig) options() (options map[string]option, config map[string]json.RawMessage) {
	r.Helper()
	m, ok := r.harness().(Manifester)
	if !ok {
		return nil, nil
	}
	manifest, err := m.Manifest(r.Context())
	r.must(err, "manifest")
	var schema struct {
		Properties map[string]option `json:"properties"`
	}
	_ = json.Unmarshal(manifest.ConfigSchema, &schema) // one that is no schema declares nothing
	_ = json.Unmarshal(r.config, &config)
	return schema.Properties, config
}

// tiers counts the options that bound the size of all.
func (b *bounding) tiers() (n int) {
	for _, what := range b.fields {
		if what == boundsBlocks || what == boundsBytes {
			n++
		}
	}
	return n
}

// kinds are the bounds that histories may have.
func (b *bounding) kinds() model.Bounded {
	all := slices.Collect(maps.Values(b.fields))
	return model.Bounded{Blocks: b.tiers() > 0, Tenant: slices.Contains(all, boundsTenant), Seconds: slices.Contains(all, boundsSeconds)}
}

// spare is what a connector may need of a bound in bytes for itself: in all, and for each block.
const spare, spareEach = 16 << 10, 256

// set gives the config with the bounds of a history, whose blocks have blockBytes bytes, and what follows from them.
func (b *bounding) set(config json.RawMessage, of *model.Bounds, blockBytes int64) (json.RawMessage, model.Limits, error) {
	all := map[string]json.RawMessage{}
	if err := json.Unmarshal(config, &all); err != nil {
		return nil, model.Limits{}, fmt.Errorf("config: %w", err)
	}
	put := func(name string, value int64) { all[name] = json.RawMessage(fmt.Sprint(value)) }
	limits := model.Limits{Fits: of.Blocks}
	for name, what := range b.fields {
		switch n := int64(of.Blocks); {
		case what == boundsBlocks:
			put(name, n)
			limits.All += of.Blocks
		case what == boundsBytes:
			bytes := spare + n*(blockBytes+spareEach)
			put(name, bytes)
			limits.All += int(bytes / blockBytes)
		case what == boundsTenant && of.Tenant > 0:
			put(name, int64(of.Tenant)*(blockBytes+spareEach))
			limits.Tenant = int(int64(of.Tenant) * (blockBytes + spareEach) / blockBytes)
			if limits.Fits == 0 || of.Tenant < limits.Fits {
				limits.Fits = of.Tenant
			}
		case what == boundsSeconds && of.Seconds > 0:
			put(name, int64(of.Seconds))
			limits.Time = time.Duration(of.Seconds) * time.Second
		}
	}
	if b.tiers() > 1 && limits.Tenant > 0 { // a quota is for memory: the other tiers may have more of a tenant
		limits.Tenant += limits.All
	}
	out, err := json.Marshal(all)
	return out, limits, err
}
