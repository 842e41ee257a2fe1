package mutants_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/connector"
)

func TestReferenceStaged(t *testing.T) {
	conformance.Run(t, conformance.Staged(conformance.Wire(mutants.Reference(), nil)), inProcess()...)
}

// What a connector writes after its Load has returned ends in landing memory: at level staged the
// mutants that do so cannot be told from connectors that keep the rule.
func TestStagedStopsLateWrites(t *testing.T) {
	for _, m := range mutants.All() {
		if m.Case != "load-ends" {
			continue
		}
		o := conformance.Options{Only: []string{m.Case}, Seed: 7, Profiles: conformance.Profiles()}
		results := conformance.Check(t.Context(), conformance.Wire(m.Plugin(), nil), o)
		require.Equal(t, conformance.Fail, results[0].Status, "in place: %s", m.Name)
		results = conformance.Check(t.Context(), conformance.Staged(conformance.Wire(m.Plugin(), nil)), o)
		require.Equal(t, conformance.Pass, results[0].Status, "staged: %s: %v", m.Name, results[0].Log)
	}
}

// patient saves until its context ends, which is what a right connector may do with a backend that is stuck.
type patient struct{ connector.Worker }

func (p patient) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if !t.Replace {
		return p.Worker.Save(ctx, t, kv)
	}
	<-ctx.Done()
	return ctx.Err()
}

// The end of a save's context reaches the connector at level staged, too.
func TestStagedCancelsSaves(t *testing.T) {
	p := mutants.Reference()
	open := p.Worker
	p.Worker = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
		w, err := open(ctx, env, config)
		return patient{w}, err
	}
	o := conformance.Options{Only: []string{"amid-call"}, Seed: 7, Profiles: conformance.Profiles()}
	results := conformance.Check(t.Context(), conformance.Staged(conformance.Wire(p, nil)), o)
	if decided(t, results[0]) {
		require.Equal(t, conformance.Pass, results[0].Status, results[0].Log)
	}
}
