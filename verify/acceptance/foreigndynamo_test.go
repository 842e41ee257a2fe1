package acceptance

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

// dynamo is how Dynamo's prefill workers choose the parameters of a handover, as its source says.
type dynamo struct {
	Source    string            `json:"source"`
	Protocols map[string]string `json:"protocols"` // by the name of vLLM's kv_connector
	Refusal   string            `json:"refusal"`
	Prefill   map[string]fields `json:"prefill"` // kv_transfer_params of the prefill worker's request, by protocol
}

// asDynamo reads what the source says.
func asDynamo(t *testing.T) *dynamo {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "foreign", "dynamo.json"))
	require.NoError(t, err)
	d := &dynamo{}
	require.NoError(t, json.Unmarshal(data, d))
	require.Contains(t, d.Source, "https://")
	for name, protocol := range d.Protocols {
		require.NotEmpty(t, d.Prefill[protocol], name)
	}
	return d
}

// params are those of a prefill worker whose vLLM has a connector.
func (d *dynamo) params(name string) (fields, error) {
	protocol, known := d.Protocols[name]
	if !known {
		list := "['" + strings.Join(slices.Sorted(maps.Keys(d.Protocols)), "', '") + "']"
		return nil, errors.New(strings.NewReplacer("NAME", name, "LIST", list).Replace(d.Refusal))
	}
	return maps.Clone(d.Prefill[protocol]), nil
}

// dynamoPage is what the page says: the beginning of the refusal, and the line that mends it.
type dynamoPage struct{ text, refusal, name, protocol string }

func readDynamoPage(t *testing.T) dynamoPage {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", "dynamo.md"))
	require.NoError(t, err)
	line := regexp.MustCompile(`(?m)^KV_CONNECTOR_PROTOCOLS\["(\w+)"\] = (\w+)$`).FindAllStringSubmatch(string(data), -1)
	require.Len(t, line, 1, "one line mends it")
	refusal := regexp.MustCompile("`(Unsupported kv_connector[^`]*)`").FindStringSubmatch(string(data))
	require.NotNil(t, refusal)
	return dynamoPage{string(data), refusal[1], line[0][1], line[0][2]}
}

// worker is Dynamo's prefill and decode worker: the one's request has the parameters of its protocol, and the other's those of the answer. Between them is no
// HTTP, so that nothing else of a request is Dynamo's.
func (d *dynamo) worker(name string) (*foreign, error) {
	params, err := d.params(name)
	if err != nil {
		return nil, err
	}
	return &foreign{
		name: fmt.Sprintf("Dynamo, %s as %s", name, d.Protocols[name]), loads: true, noChats: true, decode: passOn,
		prefill: func(f fields, _ bool) {
			oneToken(f)
			f["kv_transfer_params"] = maps.Clone(params)
		},
	}, nil
}

// TestForeignDynamo: Dynamo refuses our connector by its name, in the words of the page. With the page's line it hands over, as long as the line names the
// protocol that it names, and each of its parameters is what that protocol says.
func TestForeignDynamo(t *testing.T) {
	d, page := asDynamo(t), readDynamoPage(t)
	_, err := d.worker(page.name)
	require.ErrorContains(t, err, page.refusal)
	require.True(t, strings.HasPrefix(err.Error(), page.refusal))
	for name := range d.Protocols {
		require.Contains(t, page.text, "`"+name+"`")
	}

	d.Protocols[page.name] = page.protocol
	require.Contains(t, d.Prefill, page.protocol, "the line names a protocol that there is")
	_, err = d.worker(page.name + "V2")
	require.Error(t, err, "the line mends one name")
	router := func() *foreign {
		f, err := d.worker(page.name)
		require.NoError(t, err)
		return f
	}
	f := rig.Movers(t)[0]
	c := newContract(t, func(role string) string {
		return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s}`, f.Connector, role, f.Setups[0].Config)
	})
	c.holds(router, c.check)
	c.planted(router, c.check, handedOver())

	for name, params := range d.Prefill { // planted: another protocol
		if name != page.protocol && params["transfer_id"] != nil {
			d.Protocols[page.name] = name
			require.ErrorContains(t, c.check(router()), "transfer_id", name)
		}
	}
	delete(d.Protocols, page.name) // planted: no line
	_, err = d.worker(page.name)
	require.Error(t, err)
}
