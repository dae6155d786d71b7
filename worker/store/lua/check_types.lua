-- Set keys aside that are of another type than they are used as. Arguments: type, key for each; 'lock' is a
-- string that ends within an hour, as all that workers set do: any other would hold them off for ever.
-- Returns how many were set aside.
local LONGEST_S, num_moved = 3600, 0

local function what_is_wrong(kind, key)
  local found = type_of(key)
  if found == 'none' or found == kind then return nil end
  if kind ~= 'lock' or found ~= 'string' then return 'a ' .. found .. ' in the place of a ' .. kind end
  local ttl_s = call('TTL', key)
  if ttl_s < 0 or ttl_s > LONGEST_S then return 'a lock that does not end' end
end

for i = 1, #ARGV, 2 do
  local kind, key = ARGV[i], ARGV[i + 1]
  local why = what_is_wrong(kind, key)
  if why then
    set_aside(key, why)
    num_moved = num_moved + 1
  end
end
return num_moved
