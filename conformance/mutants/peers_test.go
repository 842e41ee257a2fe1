package mutants_test

import (
	"testing"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
)

func TestPipeReference(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.PipeReference(), nil), conformance.Pipe, conformance.Store, conformance.MultiRank, conformance.Groups)
}

func TestBufferReference(t *testing.T) {
	conformance.Run(t, conformance.InProcess(mutants.BufferReference(), nil), conformance.Buffer)
	conformance.Run(t, conformance.Wire(mutants.BufferReference(), nil), conformance.Buffer)
}
