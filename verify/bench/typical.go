package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/plugins"
	"github.com/kvport/kvport/verify/fixture"
)

// fixtures are those of the plugins of this repository, which the binary carries.
func fixtures() (fixture.List, error) { return fixture.Read(plugins.Fixtures(), "*/fixture.json") }

// fileStore is the connector that stands for those that keep blocks as files.
type fileStore struct {
	name  string
	setup json.RawMessage
}

// typicalStore is that of the fixtures.
func typicalStore() (fileStore, error) {
	list, err := fixtures()
	if err != nil {
		return fileStore{}, err
	}
	f, err := list.Typical(fixture.Store)
	if err != nil {
		return fileStore{}, err
	}
	return fileStore{f.Connector, f.Setups[0].Config}, nil
}

// find gives the path of its plugin.
func (s fileStore) find(pluginPath []string) (string, error) {
	b, err := host.Find(pluginPath, s.name)
	if err != nil {
		return "", err
	}
	return b.Path, nil
}

// config keeps blocks below a folder.
func (s fileStore) config(dir string) (json.RawMessage, error) {
	filled, err := fixture.Fill(s.setup, fixture.Values{"TMP": dir})
	return json.RawMessage(filled), err
}

// layerEnds are the configs of a producer at a port and of its consumer, of a connector that saves layer by layer.
func layerEnds(name string, port int) (producer, consumer json.RawMessage, err error) {
	list, err := fixtures()
	if err != nil {
		return nil, nil, err
	}
	f := list.Of(name)
	if f == nil || f.LayerWise == nil {
		return nil, nil, fmt.Errorf("kvport bench layerwise has no config for %s", name)
	}
	p, err := fixture.Fill(f.LayerWise.Producer, fixture.Values{"PORT": port})
	if err != nil {
		return nil, nil, err
	}
	c, err := fixture.Fill(f.LayerWise.Consumer, fixture.Values{"PORT": port})
	return json.RawMessage(p), json.RawMessage(c), err
}

// typicalPeers names the connector that stands for those that hand blocks from engine to engine.
func typicalPeers() (string, error) {
	list, err := fixtures()
	if err != nil {
		return "", err
	}
	f, err := list.Typical(fixture.Peers)
	if err != nil {
		return "", err
	}
	return f.Connector, nil
}

// holder is the plugin of the connector that reads blocks where their engine holds them.
func holder(folders []string) (*host.Binary, error) {
	list, err := fixtures()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(list, func(f *fixture.Fixture) bool { return f.Holds })
	if i < 0 {
		return nil, errors.New("no connector holds blocks")
	}
	return host.Find(folders, list[i].Connector)
}
